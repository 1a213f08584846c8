"""`minispec bench`: rules, shapes and drafters side by side; predicted beside measured; where the time goes."""
