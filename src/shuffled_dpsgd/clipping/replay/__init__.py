"""The same launches again: recordings of settled work, and captures kept in stable places."""
