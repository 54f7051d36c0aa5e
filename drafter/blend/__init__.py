"""Several drafting methods as one: `blend` selects per session and request, by measured accuracy and speed."""
