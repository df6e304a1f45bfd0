package judge

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"mailproof/fakes/ledger"
)

func row(id int64, key string, f func(*ledger.Attempt)) ledger.Attempt {
	a := ledger.Attempt{ID: id, Seq: id, Key: key, Recipient: key + "@x", Client: "w", Stage: "replied", DotAt: 1}
	f(&a)
	return a
}

func accepted(a *ledger.Attempt) {
	a.Stored, a.ReplyWritten, a.Code, a.Reply = true, true, 250, "250 ok"
}

func silent(a *ledger.Attempt) {
	a.Stored, a.Stage, a.Fault = true, "stored", "stored:drop"
}

func refused(a *ledger.Attempt) { a.ReplyWritten, a.Code, a.Reply = true, 451, "451 later" }

// TestEachKindOfEnd names for each mail what it must be called.
func TestEachKindOfEnd(t *testing.T) {
	rows := []ledger.Attempt{
		row(1, "once", accepted),
		row(2, "retried", refused), row(3, "retried", accepted),
		row(4, "doubled", silent), row(5, "doubled", accepted),
		row(6, "needless", accepted), row(7, "needless", accepted),
		row(8, "given-up", refused),
		row(9, "discarded", func(a *ledger.Attempt) { accepted(a); a.Stored, a.Breach = false, true }),
		row(10, "kept", func(a *ledger.Attempt) { refused(a); a.Stored, a.Breach = true, true }), row(11, "kept", accepted),
		row(12, "stray", accepted),
		row(13, "dedup", silent), row(14, "dedup", func(a *ledger.Attempt) { accepted(a); a.Stored, a.Deduplicated = false, true }),
	}
	keys := []string{"once", "retried", "doubled", "needless", "given-up", "discarded", "kept", "dedup", "never"}
	r, err := Judge(keys, rows, Auto)
	require.NoError(t, err)
	require.Equal(t, Key, r.By)
	require.Equal(t, 3, r.Once)
	why := map[string]string{}
	for _, list := range [][]Mail{r.Lost, r.Doubled, r.Unexpected} {
		for _, m := range list {
			why[m.Name] = m.Why
		}
	}
	require.Len(t, why, 7)
	for name, part := range map[string]string{
		"given-up": "given up after 451", "discarded": "discarded it, by script", "never": "never tried",
		"doubled": "answer to a stored mail was lost", "needless": "after a 250", "kept": "although it had stored it, by script",
		"stray": "not expected",
	} {
		require.Contains(t, why[name], part, name)
	}
	require.Equal(t, 2, r.Provider)
	require.Equal(t, 1, r.Needless)
	require.False(t, r.OK())

	var out strings.Builder
	require.NoError(t, r.Write(&out, 0))
	require.Contains(t, out.String(), "9 expected by key: 3 once, 3 lost, 3 doubled, 1 unexpected")
	require.Contains(t, out.String(), `try 5 by w to doubled@x: stored, told "250 ok"`)
	require.Contains(t, out.String(), "[stored:drop]")
}

// TestASenderThatWasGoneReadNothing: the kernel takes an answer also for one that
// was killed while the server held its session. Its second try is not needless.
func TestASenderThatWasGoneReadNothing(t *testing.T) {
	gone := func(a *ledger.Attempt) { accepted(a); a.PeerGone, a.Fault = true, "stored:hold" }
	r, err := Judge([]string{"k"}, []ledger.Attempt{row(1, "k", gone), row(2, "k", accepted)}, Key)
	require.NoError(t, err)
	require.Equal(t, []string{"nothing", "250"}, r.Doubled[0].Told)
	require.Equal(t, "sent again after the sender of a stored mail was gone before its answer", r.Doubled[0].Why)
	require.Zero(t, r.Needless)
	require.Equal(t, 1, r.Silent)
	var out strings.Builder
	require.NoError(t, r.Write(&out, 0))
	require.Contains(t, out.String(), `try 1 by w to k@x: stored, gone when "250 ok" was written [stored:hold]`)
}

func TestByRecipient(t *testing.T) {
	r, err := Judge([]string{"a@x", "b@x"}, []ledger.Attempt{row(1, "a", accepted), row(2, "b", silent), row(3, "b", accepted)}, Auto)
	require.NoError(t, err)
	require.Equal(t, Recipient, r.By)
	require.Equal(t, 1, r.Once)
	require.Equal(t, []string{"nothing", "250"}, r.Doubled[0].Told)
}

func TestAPassIsSaidSo(t *testing.T) {
	r, err := Judge([]string{"k"}, []ledger.Attempt{row(1, "k", accepted)}, Key)
	require.NoError(t, err)
	require.True(t, r.OK())
	var out strings.Builder
	require.NoError(t, r.Write(&out, 0))
	require.Contains(t, out.String(), "pass")
}

func TestNothingProvesNothing(t *testing.T) {
	_, err := Judge(nil, []ledger.Attempt{row(1, "k", accepted)}, Key)
	require.ErrorIs(t, err, ErrNothing)
	_, err = Judge([]string{"k"}, nil, Key)
	require.ErrorIs(t, err, ErrNothing)
}

func TestReadKeys(t *testing.T) {
	keys, err := ReadKeys(strings.NewReader("# mine\n a \n\nb\n"))
	require.NoError(t, err)
	require.Equal(t, []string{"a", "b"}, keys)
	_, err = ReadKeys(strings.NewReader("a\nb\na\n"))
	require.ErrorContains(t, err, "line 3")
}
