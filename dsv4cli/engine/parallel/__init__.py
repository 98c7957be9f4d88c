"""What do ranks tell each other, how do they start and end?"""
