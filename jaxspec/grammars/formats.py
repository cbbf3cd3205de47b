"""Regular expressions of the values of JSON Schema's keyword `format`, and of JSON's own scalars.

An expression gives texts that are valid for the format, not all of them: years are 1000 to 2999, for example.
"""

from __future__ import annotations

YEAR = "[12][0-9]{3}"
LEAP_YEAR = "(?:[12][0-9](?:0[48]|[2468][048]|[13579][26])|(?:12|16|20|24|28)00)"
DAY = "(?:0[1-9]|1[0-9]|2[0-8])"
DATE = f"(?:{YEAR}-(?:(?:0[1-9]|1[0-2])-{DAY}|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)|{LEAP_YEAR}-02-29)"
HOUR = "(?:[01][0-9]|2[0-3])"
TIME = f"{HOUR}:[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{{1,6}})?(?:Z|[+-]{HOUR}:[0-5][0-9])"
DAYS = "(?:[0-9]+D|[0-9]+M(?:[0-9]+D)?|[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?)"
HOURS = "T(?:[0-9]+S|[0-9]+M(?:[0-9]+S)?|[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?)"
LABEL = "[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*"
HOST = f"{LABEL}(?:\\.{LABEL})+"
OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
HEX = "[0-9a-fA-F]"
URI_CHAR = f"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%{HEX}{{2}})"

FORMATS = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "duration": f"P(?:{DAYS}(?:{HOURS})?|{HOURS}|[0-9]+W)",
    "email": f"[A-Za-z0-9_-]+(?:[.+][A-Za-z0-9_-]+)*@{HOST}",
    "ipv4": f"{OCTET}(?:\\.{OCTET}){{3}}",
    "uri": f"https?://{HOST}(?::[0-9]{{1,4}})?(?:/{URI_CHAR}*)*(?:\\?{URI_CHAR}*)?(?:#{URI_CHAR}*)?",
    "uuid": f"{HEX}{{8}}-{HEX}{{4}}-{HEX}{{4}}-{HEX}{{4}}-{HEX}{{12}}",
}

INTEGER = "-?(?:0|[1-9][0-9]*)"
NUMBER = f"{INTEGER}(?:\\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
