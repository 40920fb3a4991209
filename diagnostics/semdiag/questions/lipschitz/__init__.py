"""The question lipschitz."""
