"""Anthropic's Messages API: chats in another form."""
