"""Hidden states as messages: rows of numbers, and the declarations of which ones a drafter reads."""
