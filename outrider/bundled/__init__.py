"""The trained drafters that come with Outrider."""
