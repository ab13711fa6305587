"""Tools in conversations: how they are laid out, and the forms in which models write calls."""
