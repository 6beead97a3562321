"""`python -m pagedweight`: the same command where scripts are not on the path."""

from pagedweight.cli.main import main

if __name__ == "__main__":
    main()
