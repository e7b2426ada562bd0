"""U-Nets: convolutions down and up, with skips between."""
