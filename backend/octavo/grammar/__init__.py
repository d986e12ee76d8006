"""From the form that an answer must have to the tokens that it may go on with."""
