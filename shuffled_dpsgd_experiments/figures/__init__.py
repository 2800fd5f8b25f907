"""The paper's figures 1 to 4: what is computed, what the paper says of it, and the drawing."""
