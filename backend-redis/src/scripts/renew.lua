#!lua flags=allow-oom
-- Renews what is still held; never makes it anew. Runs on a server without free memory as well.
-- KEYS: locks, or entries that a claim reserved; ARGV: for each its owner and its ttl in ms
-- Returns for each 1 if it was renewed, otherwise 0.
local renewed, now = {}, nil
for i = 1, #KEYS do
  local owner, ttl = ARGV[2 * i - 1], ARGV[2 * i]
  local held = redis.call('GET', KEYS[i])
  renewed[i] = 0
  if held and string.sub(held, 1, 32) == owner then
    renewed[i] = redis.call('PEXPIRE', KEYS[i], ttl)
  elseif held and string.sub(held, 1, 34) == 'c:' .. owner then
    if not now then
      local time = redis.call('TIME')
      now = time[1] * 1000000 + time[2]
    end
    local kept = string.match(held, '^(c:%x+:%d+:%d+:)')
    local till = string.format('%.0f', now + ttl * 1000)
    redis.call('SET', KEYS[i], kept .. till, 'PX', ttl)
    renewed[i] = 1
  end
end
return renewed
