"""Launch files of a deployment plan, in the formats of forerun and of other systems."""
