/* process.c - descriptors and signals at the start of a process. */
#include "train/process.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

void process_prepare(void)
{
    int fd;
    do fd = open("/dev/null", O_RDWR); /* it gets the lowest free number */
    while (fd >= 0 && fd <= STDERR_FILENO);
    if (fd >= 0) close(fd);
    signal(SIGXFSZ, SIG_IGN);
}
