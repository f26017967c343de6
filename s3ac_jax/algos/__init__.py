"""The maths of the methods: functions from arrays to arrays, and the recipes made of them."""
