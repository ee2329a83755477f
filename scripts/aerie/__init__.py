"""Modules that Aerie's scripts share. Imports point one way: numbered script -> aerie -> libraries."""
