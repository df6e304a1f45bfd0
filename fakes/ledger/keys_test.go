package ledger

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"mailproof/fakes/ledger/tally"
)

// TestVerdictsAreExactWhenKeysLeaveMemory holds 256 rows and a handful of keys
// in memory: verdict by key, all verdicts, copies and deduplication are those
// of a plain count.
func TestVerdictsAreExactWhenKeysLeaveMemory(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := New(256)
		l.keys = tally.New(rapid.IntRange(2, 50).Draw(t, "keys in memory"))
		defer func() { require.NoError(t, l.Close()) }()
		keys := rapid.IntRange(1, 150).Draw(t, "keys")
		copies, tries, deduped := map[string]int{}, map[string]int{}, 0
		for i := range rapid.IntRange(1, 600).Draw(t, "mails") {
			k := fmt.Sprint("k", i*7%keys)
			to := fmt.Sprintf("r%d@x", i%2)
			dedup := ""
			if i%3 == 0 {
				dedup = "d" + k
			}
			a := put(l, k, to, dedup)
			tries[k]++
			if a.Deduplicated {
				deduped++
				require.NotEmpty(t, dedup)
				continue
			}
			copies[k+to]++
			require.Equal(t, copies[k+to], a.Copy)
		}
		require.NoError(t, l.Err())
		require.EqualValues(t, deduped, l.Totals().Deduplicated)
		all, err := l.Verdicts()
		require.NoError(t, err)
		require.Len(t, all, len(tries))
		for _, v := range all {
			require.Equal(t, tries[v.Key], v.Attempts)
			for to, n := range v.Recipients {
				require.Equal(t, copies[v.Key+to], n)
			}
			one, err := l.Verdict(v.Key)
			require.NoError(t, err)
			require.Equal(t, v, one)
		}
	})
}

// TestAKeyThatCannotBeReadIsAnError: after Close, a key that left memory is not
// called unseen.
func TestAKeyThatCannotBeReadIsAnError(t *testing.T) {
	l := New(256)
	l.keys = tally.New(10)
	for i := range 42 {
		put(l, fmt.Sprint("k", i), "a@x", "")
	}
	require.NoError(t, l.Close())
	_, err := l.Verdict("k3")
	require.Error(t, err)
	v, err := l.Verdict("k41")
	require.NoError(t, err)
	require.Equal(t, "once", v.Verdict)
}
