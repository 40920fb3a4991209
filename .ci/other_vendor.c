/* Tells MKL that the processor is Intel's, so that it takes the code paths it keeps for those:
   gcc -shared -fPIC -o other_vendor.so other_vendor.c, then LD_PRELOAD=$PWD/other_vendor.so. */
int mkl_serv_intel_cpu_true(void) { return 1; }
int mkl_serv_intel_cpu(void) { return 1; }
