"""One consumer of attention calls: rows, layers, residuals, a monitor."""
