"""Files inside of wheels."""

import zipfile


def member_ending(wheel, ending):
    """The content of the one file of a wheel whose name ends so."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(ending)]
        return archive.read(name)
