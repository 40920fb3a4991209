"""Where attention is seen: an adapter for each library, each of which gives attention calls."""
