"""Client library of Octavo on `tritonclient`; installs without torch."""
