"""The methods of training drafters."""
