"""What can be measured besides a clean forward pass; one folder or file a probe."""
