"""Tables to console, HTML and SVG, and pictures of volumes."""
