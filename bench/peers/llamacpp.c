/* Greedy generation with llama.cpp's C API, for llamacpp.py: the loop is in C, so that the peer pays
   for no interpreter. A context is kept as long as the number of rows stays the same. */
#include "llama.h"

#include <stdint.h>
#include <stdlib.h>

static struct llama_model *model;
static struct llama_context *context;
static int context_rows, context_tokens, threads;

static void silent(enum ggml_log_level level, const char *text, void *data) {
    (void)level, (void)text, (void)data;
}

int peer_load(const char *path, int thread_count) {
    llama_log_set(silent, NULL);
    llama_backend_init();
    threads = thread_count;
    model = llama_model_load_from_file(path, llama_model_default_params());
    return model ? 0 : 1;
}

/* One context holds `rows` sequences of `tokens` tokens each, with a cache of its own for each row. */
static int prepare(int rows, int tokens) {
    if (context && rows == context_rows && tokens <= context_tokens) {
        llama_memory_clear(llama_get_memory(context), true);
        return 0;
    }
    if (context) llama_free(context);
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = (uint32_t)(rows * tokens);
    params.n_batch = params.n_ctx < 512 ? 512 : params.n_ctx;
    params.n_seq_max = (uint32_t)rows;
    params.n_threads = params.n_threads_batch = threads;
    params.kv_unified = false;
    params.no_perf = true;
    context = llama_init_from_model(model, params);
    context_rows = rows;
    context_tokens = tokens;
    return context ? 0 : 1;
}

static llama_token best(int row, int vocabulary) {
    const float *logits = llama_get_logits_ith(context, row);
    llama_token at = 0;
    for (llama_token i = 1; i < vocabulary; i++)
        if (logits[i] > logits[at]) at = i;
    return at;
}

/* prompts[rows][length] -> out[rows][count]; `room` is the longest sequence this batch size will see. */
int peer_generate(int rows, int length, int room, const int32_t *prompts, int count, int32_t *out) {
    if (prepare(rows, room)) return 1;
    int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
    struct llama_batch batch = llama_batch_init(rows * length, 0, 1);
    int status = 0;
    for (int step = 0; step < count && !status; step++) {
        int width = step ? 1 : length;
        batch.n_tokens = rows * width;
        for (int i = 0; i < batch.n_tokens; i++) {
            int row = i / width, at = i % width;
            batch.token[i] = step ? out[row * count + step - 1] : prompts[i];
            batch.pos[i] = step ? length + step - 1 : at;
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = row;
            batch.logits[i] = at == width - 1;
        }
        status = llama_decode(context, batch);
        for (int row = 0; row < rows && !status; row++)
            out[row * count + step] = best(row * width + width - 1, vocabulary);
    }
    llama_batch_free(batch);
    return status;
}
