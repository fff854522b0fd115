"""Other clusters that run jobs of this one: who they are, what is sent to them, what they say."""
