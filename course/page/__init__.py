"""The page that `ladder report` writes: the whole ladder in one HTML file that needs no network."""
