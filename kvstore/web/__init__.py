"""The page at `/` of the metrics port: one daemon, live, in a browser. Read-only.

    opening     the thread, its loop, and how the port hands a request to it   (opening.py)
    visitors    who is let in: Host, Origin, token, credentials, cookies       (visitors.py)
    app         what is asked for, and the headers of every answer             (app.py)
    watch       one look a second, shared by all who watch                     (watch.py)
    shapes      replies of the daemon as JSON                                  (shapes.py)
    page.html, page.js, sign_in.html: what a browser gets

Nothing here runs on the loop that answers engines. Starlette and uvicorn are imported when the
first visitor comes.
"""
