"""Lather in the trainers of other libraries. Each file needs its library; nothing else imports them."""
