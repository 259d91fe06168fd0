"""The mathematics: from logits to laws, and from drafts to a verdict. Pure functions over numpy or torch arrays."""
