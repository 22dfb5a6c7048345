@echo off
rem Sets up what is missing, then serves; "start.bat --help" lists the options.
python "%~dp0start.py" %*
exit /b %errorlevel%
