"""Who is slow, hung or failing, and what follows: pure, from what members and checks say."""
