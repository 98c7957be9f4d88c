"""Conversations: from messages to answers, with a local engine or a remote server."""
