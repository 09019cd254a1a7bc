/* driver.c - a libcuda.so.1 with only the calls that moetrain makes first. Tests of the messages for unusable GPUs and
 * the emulator (tests/emulator/) load it. The build sets DRIVER_VERSION, N_GPU and CAPABILITY (10 * major + minor),
 * once per simulated machine. */
int cuDriverGetVersion(int *version);
int cuInit(unsigned flags);
int cuGetErrorString(int error, const char **text);
int cuDeviceGetCount(int *n);
int cuDeviceGet(int *device, int index);
int cuDeviceGetName(char *name, int size, int device);
int cuDeviceGetAttribute(int *value, int attribute, int device);
int cuCtxGetExecAffinity(unsigned affinity[2], int type);

enum { /* CUdevice_attribute */
       MULTIPROCESSORS = 16,
       INTEGRATED = 18,
       CAPABILITY_MAJOR = 75,
       CAPABILITY_MINOR = 76,
       HOST_POINTERS = 91
};

int cuDriverGetVersion(int *version)
{
    *version = DRIVER_VERSION;
    return 0;
}

int cuInit(unsigned flags) { return (int)flags; }

int cuGetErrorString(int error, const char **text)
{
    *text = "an error";
    return 0 * error;
}

int cuDeviceGetCount(int *n)
{
    *n = N_GPU;
    return 0;
}

int cuDeviceGet(int *device, int index)
{
    *device = index;
    return 0;
}

int cuDeviceGetName(char *name, int size, int device)
{
    static const char text[] = "Fake GPU";
    for (int i = 0; i < (int)sizeof(text) && i < size; i++) name[i] = text[i];
    return 0 * device;
}

int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    *value = attribute == CAPABILITY_MAJOR   ? CAPABILITY / 10
             : attribute == CAPABILITY_MINOR ? CAPABILITY % 10
             : attribute == MULTIPROCESSORS  ? 9
             : attribute == INTEGRATED       ? 0
             : attribute == HOST_POINTERS    ? CAPABILITY != 80
                                             : 1;
    return 0 * device;
}

/* As under MPS: the context has fewer multiprocessors than the GPU. */
int cuCtxGetExecAffinity(unsigned affinity[2], int type)
{
    affinity[0] = (unsigned)type;
    affinity[1] = 7;
    return 0;
}
