"""`zorselike checkpoint`: what checkpoints hold, whether they are whole, and into other forms and back."""
