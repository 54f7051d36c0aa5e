"""Report of a run: records of its requests, figures made of them, and a page that shows them."""
