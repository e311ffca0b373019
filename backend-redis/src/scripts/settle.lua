#!lua flags=allow-oom
-- Completes or abandons an entry of an owner.
-- KEYS: 1 the entry, 2 the mark of a request that was given up
-- ARGV: 1 owner, 2 how long it is kept once done in ms (0: abandon), 3 how long the mark lasts
-- Returns 1 if the owner had it, otherwise 0.
local held = redis.call('GET', KEYS[1])
local state, by, token, since, till
if held then
  state, by, token, since, till = string.match(held, '^(%a):(%x+):(%d+):(%d+):(%d+)$')
end
if ARGV[2] == '0' then
  if by == ARGV[1] and state ~= 'd' then return redis.call('DEL', KEYS[1]) end
  redis.call('SET', KEYS[2], '1', 'PX', ARGV[3])
  return 0
end
if by ~= ARGV[1] then return 0 end
if state ~= 'd' then
  local time = redis.call('TIME')
  local now = string.format('%.0f', time[1] * 1000000 + time[2])
  redis.call('SET', KEYS[1], 'd:' .. by .. ':' .. token .. ':' .. now .. ':0', 'PX', ARGV[2])
end
return 1
