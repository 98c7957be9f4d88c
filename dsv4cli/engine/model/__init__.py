"""What does DeepSeek-V4 compute? Nothing here reads files, allocates state or chooses a token."""
