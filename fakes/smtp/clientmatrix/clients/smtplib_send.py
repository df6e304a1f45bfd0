"""Sends one mail with Python's smtplib and prints what it reported as JSON."""
import json
import smtplib
import sys

host, port, to, path = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
with open(path, encoding="utf-8", newline="") as f:
    mail = f.read()
try:
    with smtplib.SMTP(host, port, local_hostname="smtplib", timeout=2) as s:
        s.sendmail("a@example.com", [to], mail)
    print(json.dumps({"ok": True}))
except smtplib.SMTPRecipientsRefused as e:
    code, text = next(iter(e.recipients.values()))
    print(json.dumps({"ok": False, "code": code, "text": type(e).__name__}))
except smtplib.SMTPResponseException as e:
    print(json.dumps({"ok": False, "code": e.smtp_code, "text": type(e).__name__}))
except Exception as e:  # every other error is a finding of the table
    print(json.dumps({"ok": False, "code": 0, "text": type(e).__name__}))
