"""Adapters that turn a library's attention into attention calls, one for each library."""
