#!lua
-- Takes locks, each for itself: the requests of several callers go out together.
-- KEYS: for each lock the last token of its slot, the mark of a request that was given up, the lock
-- ARGV: 1 how long to keep a last token in ms, then for each lock owner (32 hex digits), ttl in ms
-- Returns for each lock two values: 1 and its token, 0 and the ms until its holder expires, or
-- -1 and 0 for a request that was given up.
--
-- A lock is a string "<owner>:<token>", with a "!" at its end once somebody wants it too: its
-- release is published only then.
local answers, now = {}, nil
for n = 0, #KEYS / 3 - 1 do
  local lastkey, lock = KEYS[3 * n + 1], KEYS[3 * n + 3]
  local owner, ttl = ARGV[2 * n + 2], ARGV[2 * n + 3]
  local values = redis.call('MGET', lastkey, KEYS[3 * n + 2], lock)
  local held, code, value = values[3], 1, nil
  if not held then
    if values[2] then
      code, value = -1, 0
    else
      if not now then
        local time = redis.call('TIME')
        now = time[1] .. string.sub('00000' .. time[2], -6)
      end
      local last, keep = values[1], ARGV[1]
      value = now
      -- both have 16 digits for centuries, so that they compare as text
      if last and last >= now then
        value = string.format('%.0f', last + 1)
        -- a token that is ahead of the clock is kept until the clock has caught up
        keep = string.format('%.0f', keep + math.ceil((value - now) / 1000))
      end
      redis.call('SET', lastkey, value, 'PX', keep)
      redis.call('SET', lock, owner .. ':' .. value, 'PX', ttl)
    end
  elseif string.sub(held, 1, 32) == owner then
    -- the same request once more: its first answer was lost
    redis.call('PEXPIRE', lock, ttl)
    value = string.match(held, ':(%d+)', 33)
  else
    if string.sub(held, -1) ~= '!' then redis.call('SET', lock, held .. '!', 'KEEPTTL') end
    code, value = 0, redis.call('PTTL', lock)
  end
  answers[2 * n + 1], answers[2 * n + 2] = code, value
end
return answers
