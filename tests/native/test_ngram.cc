// The n-gram trie, appended to and asked from several threads.
#include <random>

#include "common/ngram_trie.h"
#include "rig.h"

namespace native_tests {
namespace {

TEST(an_ngram_trie_is_asked_while_it_grows_and_evicts) {
  for (const char* mode : {"bfs", "prob"}) {
    jaxserve::NgramTrie trie({/*capacity=*/400, /*max_depth=*/6, /*max_match=*/4, 1, 4, mode});
    std::atomic<bool> stop{false};
    Threads writers, readers;
    for (unsigned t = 0; t < 2; ++t) {
      writers.start([&, t] {
        std::mt19937 random(t);
        for (int text = 0; text < 60; ++text) {
          std::vector<int32_t> tokens(1 + random() % 200);
          for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 12);
          trie.append(tokens.data(), static_cast<int64_t>(tokens.size()), static_cast<int64_t>(tokens.size()) / 2);
        }
      });
      readers.start([&, t] {
        std::mt19937 random(100 + t);
        int32_t context[5], drafts[16], parents[16];
        while (!stop) {
          for (int32_t& token : context) token = static_cast<int32_t>(random() % 12);
          const auto match = trie.match(context, 5, 16, drafts, parents);
          CHECK(match.num_drafts <= 16);
          for (int32_t i = 0; i < match.num_drafts; ++i) CHECK(parents[i] >= 0 && parents[i] <= i);
          CHECK(trie.num_nodes() <= trie.capacity());
          std::this_thread::yield();
        }
      });
    }
    writers.join();
    stop = true;
    readers.join();
    trie.check_integrity();
    CHECK(trie.num_evictions() > 0);
  }
}

}  // namespace
}  // namespace native_tests
