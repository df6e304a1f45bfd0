package resendapi

import (
	"bufio"
	"fmt"
	"net"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// heapGrownMost is how many bytes a mail with a new key and recipient may add
// to the heap for good. It adds five counts (tries of the key, copies, the
// key's newest row, the key's answer, the contents' latest sighting), each 12
// bits of filter and an eighth of a byte of index once it stands in a file: 8
// bytes. The rest is for how full the maps happen to be: 16 bytes are 2.4 MB
// from 40,000 to 200,000 mails.
const heapGrownMost = 16

// TestMemoryIsFlat sends 200,000 mails of 1.8 KB, no two keys or recipients
// alike. The first 40,000 fill what is bounded: rows, recent keys.
func TestMemoryIsFlat(t *testing.T) {
	filled, mails := int64(40_000), int64(200_000)
	if testing.Short() || raceEnabled {
		mails = 60_000
	}
	srv, err := Start(Options{KeepRows: 4096})
	require.NoError(t, err)
	defer func() { require.NoError(t, srv.Close()) }()
	html := strings.Repeat("<p>0123456789abcdef0123456789abcdef</p>", 45)
	nc, err := net.Dial("tcp", srv.Addr())
	require.NoError(t, err)
	defer nc.Close()
	br := bufio.NewReader(nc)
	send := func(from, to int64) {
		for n := from; n < to; n++ {
			require.NoError(t, post(nc, br, 0, n, html))
		}
	}
	send(0, filled)
	before := heapBytes()
	send(filled, mails)
	grown := int64(heapBytes()) - int64(before)
	perMail := float64(grown) / float64(mails-filled)
	t.Logf("heap %.1f MB at %d mails, grown by %.2f MB up to %d: %.1f bytes a mail",
		float64(before)/(1<<20), filled, float64(grown)/(1<<20), mails, perMail)
	require.Less(t, perMail, float64(heapGrownMost))

	// What left memory is known as exactly as before.
	require.EqualValues(t, mails, srv.Totals().Stored)
	require.Zero(t, srv.Totals().Findings)
	for _, n := range []int64{0, filled, mails - 1} {
		require.NoError(t, post(nc, br, 0, n, html))
		v := srv.Verdict(fmt.Sprintf("k0-%d", n))
		require.Equal(t, "once", v.Verdict)
		require.Equal(t, 2, v.Attempts)
		require.Equal(t, 1, v.Deduplicated)
		e, ok := srv.mails.get(n)
		require.True(t, ok)
		m, apiErr := srv.email(n, e)
		require.Nil(t, apiErr)
		require.Equal(t, html, *m.HTML)
	}
	require.EqualValues(t, mails, srv.Totals().Stored)
}

func heapBytes() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
