#!lua
-- Takes locks, each for itself: the requests of several callers go out together.
-- KEYS: 1 the last token, 2.. the locks
-- ARGV: 1 how long to keep the last token in ms, then for each lock its owner (32 hex digits) and
--       its ttl in ms
-- Returns for each lock its token (text), or a number: the ms until its holder expires, below 0 if
-- that is not known or the request was given up.
--
-- A lock is a string "<owner>:<token>", with a "!" at its end once somebody wants it too: its
-- release is published only then. The last token has behind it "!<µs>" if a request was given up:
-- only until then are there marks to look for. Their names end in "gone:<owner>" where that of the
-- last token ends in "last:lease".
--
-- Each call of the server costs about as much as all else in a round: hence one for the time, one
-- that reads and writes the last token, and one for each lock.
local call, sub, KEYS, ARGV = redis.call, string.sub, KEYS, ARGV
local time = call('TIME')
local now = time[1] .. sub('00000' .. time[2], -6)
local last = call('SET', KEYS[1], now, 'GET', 'PX', ARGV[1])
local token, gone = now, nil
-- both have 16 digits for centuries, so that they compare as text
if last and (last >= now or #last > 16) then
  local till
  last, till = string.match(last, '^(%d+)!?(%d*)')
  if till > now then gone = till end
  local keep = ARGV[1]
  if last >= now then
    token = string.format('%.0f', last + 1)
    -- a token that is ahead of the clock is kept until the clock has caught up
    keep = string.format('%.0f', keep + math.ceil((token - now) / 1000))
  end
  call('SET', KEYS[1], gone and token .. '!' .. gone or token, 'PX', keep)
end

local answers = {}
for n = 2, #KEYS do
  local lock, owner, ttl = KEYS[n], ARGV[2 * n - 2], ARGV[2 * n - 1]
  local held, answer = nil, token
  if gone and call('GET', sub(KEYS[1], 1, -11) .. 'gone:' .. owner) then
    held = call('GET', lock)
    if not held then answer = -3 end
  else
    held = redis.pcall('SET', lock, owner .. ':' .. token, 'NX', 'GET', 'PX', ttl)
    if type(held) == 'table' then
      -- not a string, so not a lock
      call('SET', lock, owner .. ':' .. token, 'PX', ttl)
      held = nil
    end
  end
  if held then
    if sub(held, 1, 32) == owner then
      -- the same request once more: its first answer was lost
      call('PEXPIRE', lock, ttl)
      answer = string.match(held, ':(%d+)', 33)
    else
      if sub(held, -1) ~= '!' then call('SET', lock, held .. '!', 'KEEPTTL') end
      answer = call('PTTL', lock)
    end
  end
  answers[n - 1] = answer
end
return answers
