"""The mechanism of a step: whoever carries out a plan. The policy, which makes plans, is `forerun.engine`."""
