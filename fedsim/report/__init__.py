def write_report(run, jobs):
    pass
