"""The command line, one module a group of commands.

The modules, in the order of a sample's way::

    app       all of it from the command line
    common    how a command prints and ends
    output    what was found -> text
    cache     what is in a cache, and how to delete it
    uploads   ... what uploads have left
"""
