"""reverse-text"""
