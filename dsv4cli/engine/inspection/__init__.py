"""What is this model, would it load, is it sound, does it fit?"""
