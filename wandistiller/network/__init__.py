"""A network as a thing: made of any weights, prepared in one order, called by its velocity."""
