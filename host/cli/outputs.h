/* The files that options name for writing, looked at before any work is done. */
#ifndef KVR_CLI_OUTPUTS_H
#define KVR_CLI_OUTPUTS_H

#include "cli/options.h"

/* Errors: KVR_E_RANGE for a name that cannot be meant, KVR_E_CONFLICT for one that is named twice
 * or is read as well, KVR_E_IO for what cannot be written; each names option, file and fix. */
kvr_status cli_outputs_check(const cli_options *options);

#endif
