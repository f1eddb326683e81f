"""Problems: their sizes and inputs, what one call computes, and what it costs."""
